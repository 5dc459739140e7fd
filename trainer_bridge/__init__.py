"""The trainer's side of zerodrift: client, training forward, comparison."""
