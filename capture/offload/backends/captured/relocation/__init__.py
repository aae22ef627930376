"""Which words of a captured model hold which address: found by comparing captures, and proved.

Pure data: no driver is used and no capture is made here. Backends pass their captures as
`GraphCapture`.
"""
