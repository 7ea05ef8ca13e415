"""Helpers of the tests: tiny models and their parameters."""
