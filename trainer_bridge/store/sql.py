"""Questions in SQL over a runs folder, by DuckDB."""

from __future__ import annotations

from pathlib import Path

import duckdb

from rollout.errors import InvalidRequest
from trainer_bridge.store.schema import TABLES


def answer(root: Path, sql: str) -> str:
    """What DuckDB says, as a table in text; ``steps``, ``samples`` and ``tokens`` have columns ``run`` and ``step``.

    A table with no file yet is left out. Errors: InvalidRequest with DuckDB's words.
    """
    connection = duckdb.connect()
    for table in TABLES:
        if any(root.glob(f"run=*/{table}/step=*/*.parquet")):
            pattern = str(root / f"run=*/{table}/step=*/*.parquet").replace("'", "''")
            files = f"read_parquet('{pattern}', hive_partitioning=true, union_by_name=true)"
            connection.execute(f"CREATE VIEW {table} AS SELECT * FROM {files}")
    try:
        return str(connection.sql(sql))
    except duckdb.Error as error:
        raise InvalidRequest(f"DuckDB: {error}", field="sql") from error
