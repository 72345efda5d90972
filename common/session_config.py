"""Settings of a Ray session, readable without Ray."""

from pydantic import Field

from common.config import Strict


class SessionError(RuntimeError):
    """No session of Ray starts on this machine."""


class SessionConfig(Strict):
    """The place where the work runs, of no influence on results."""

    num_cpus: int | None = Field(default=None, ge=1)
    """Logical CPUs of a local session; all of this machine's when not set. A cluster has its own."""
    address: str | None = None
    """Address of a running cluster (`auto`: the one this host belongs to). RAY_ADDRESS does the same."""
