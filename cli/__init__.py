"""The `tandem` command: fills configurations, starts processes, prints. Decides nothing that a library should."""
