"""Scan a source folder: which files there are, what could go wrong with them, and reading them."""

from shard_tools.scan.report import ScanReport, report_on
from shard_tools.scan.source import SourceReader, source_error
from shard_tools.scan.walk import Walk, walk

__all__ = ["ScanReport", "SourceReader", "Walk", "report_on", "source_error", "walk"]
