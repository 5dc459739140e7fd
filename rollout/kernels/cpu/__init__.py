"""CPU kernel set: rows are independent by construction; the embedded default and the reference."""
