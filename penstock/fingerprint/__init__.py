"""A name for what an object means: the same in every process and after a restart.

Values are known by type and content, instances by class and state, code by what it was compiled to
with its defaults, its closure and the globals it reads, and installed packages by name and version.
"""

from penstock.fingerprint.code import register_code
from penstock.fingerprint.state import register_state
from penstock.fingerprint.values import register_values
from penstock.fingerprint.walk import fingerprint

register_values()
register_code()
register_state()

__all__ = ["fingerprint"]
