"""Why a region of launches has no kernel."""


class UnsupportedRegion(Exception):
    """A region has no kernel and stays as recorded; the message says why."""


class PassingRefusal(UnsupportedRegion):
    """The same for a reason that may pass: another attempt may succeed, so it is not kept."""
