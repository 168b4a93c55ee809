"""What lives inside the probe processes; started by command line, never imported by the search."""
