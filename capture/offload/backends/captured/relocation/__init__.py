"""Which words of a captured model hold which address: told by comparing captures, and proved.

Pure data: no driver, no capture is made here. Backends give what they captured as `GraphCapture`.
"""
