"""What people look at: drawn timelines, diagnoses, calibrations, reports.

Nothing that executes imports it.
"""
