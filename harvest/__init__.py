"""What users import and run: the block client, plan, run, open and the command line."""
