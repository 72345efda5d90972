"""Settings of a Ray session, readable without Ray."""

from pydantic import Field

from declutr.common.config import Strict


class SessionError(RuntimeError):
    """No Ray session could be started on this machine."""


class SessionConfig(Strict):
    """The place where the work runs; it has no influence on results."""

    num_cpus: int | None = Field(default=None, ge=1)
    """Logical CPUs of a local session; all CPUs of this machine if not set. Not used with a cluster."""
    address: str | None = None
    """Address of a running cluster (`auto`: the one that this host belongs to). RAY_ADDRESS has the same effect."""
