"""Reporting for a run: console, metrics, timeline, report.html and trace.json."""
