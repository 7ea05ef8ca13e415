"""Batch evaluation: tasks, scoring, the resumable job and its figures."""
