"""The report: result files in, README tables, `docs/measurements.md` and plots out."""
