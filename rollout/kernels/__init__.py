"""Kernel sets: who computes each operation whose order of arithmetic matters."""
