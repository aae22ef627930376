"""Why a region of launches becomes no kernel."""


class UnsupportedRegion(Exception):
    """No kernel is made of a region, which stays as recorded; the message says why, for people."""


class PassingRefusal(UnsupportedRegion):
    """The same, for a reason that may pass: another time may end otherwise, so it is not kept."""
