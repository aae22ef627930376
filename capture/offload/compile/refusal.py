"""Why a region of launches becomes no kernel."""


class UnsupportedRegion(Exception):
    """No kernel is made of a region, which stays as recorded; the message says why, for people."""
