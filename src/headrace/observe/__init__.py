"""Looking at a run: metrics, the live view, the report and `headrace show`. Never imports torch."""
