"""The command line: parses, calls the API, renders; the only place that prints or exits."""
