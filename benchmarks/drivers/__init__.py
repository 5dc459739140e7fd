"""Programs that each hold one engine in a process of its own and answer the benchmark over JSON lines.

A process that has nothing to do blocks on its standard input, so it neither spins nor shares an OpenMP runtime with
another engine. A driver imports its engine, ``channel`` and the standard library; it may run in a foreign environment.
"""
