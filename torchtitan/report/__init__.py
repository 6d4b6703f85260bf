"""What a run tells of itself: console, metrics, events over time, report.html, trace.json."""
