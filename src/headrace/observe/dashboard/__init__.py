"""A local web page over a run directory: live, finished or crashed. See docs/dashboard.md."""
