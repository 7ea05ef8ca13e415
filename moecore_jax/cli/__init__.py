"""The command line: one small module for each verb, each with `main(argv)`."""
