"""Programs in plain torch: run launch by launch, given inputs, named and described.

Nothing here knows a device's backend or plans memory.
"""
