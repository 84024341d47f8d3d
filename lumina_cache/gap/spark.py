"""The same analysis on Apache Spark, for stores that one machine should not read."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..errors import AnalysisUnavailableError
from .store import empty_file

if TYPE_CHECKING:
    import ibis
    import pyarrow as pa

__all__ = ["Spark"]


class Spark:
    """An engine for :func:`~lumina_cache.gap.store.open_tables`.

    Args:
        session: a ``pyspark.sql.SparkSession``; None for one on this machine, with a thread per core. Every node of a
            cluster must see the store under the same path.

    Raises:
        AnalysisUnavailableError: pyspark, or its part of ibis, is not installed.
    """

    name = "spark"

    def __init__(self, session: Any = None) -> None:
        try:
            import ibis
            from pyspark.sql import SparkSession

            self._backend = ibis.pyspark
        except (ImportError, AttributeError) as error:
            raise AnalysisUnavailableError(
                f'Spark is not installed ({error}): pip install "lumina-cache[spark]"'
            ) from None
        self.session = session or _local(SparkSession)
        self.connection = self._backend.connect(self.session)
        self._scratch = TemporaryDirectory(prefix="lumina-gap-")

    def read(self, files: Sequence[Path], empty: pa.Schema) -> ibis.Table:
        paths = [str(f) for f in files] or [str(empty_file(Path(self._scratch.name), empty))]
        name = f"observations_{uuid.uuid4().hex}"
        self.session.read.parquet(*paths).createOrReplaceTempView(name)
        return self.connection.table(name)


def _local(sessions: Any) -> Any:
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.driver.memory": "1g",
    }
    builder = sessions.builder.master("local[*]").appName("lumina-cache gap")
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
