"""What users look at: drawn timelines, diagnoses, calibrations, reports.

Code that executes never imports it.
"""
