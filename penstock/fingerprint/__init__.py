"""Fingerprints of objects: the same in every process and after a restart.

The fingerprint of a value depends on its type and content; that of an instance on its class and
state; that of a user's code on its bytecode, its defaults, its closure and the globals it reads;
that of installed code on its name and the version of its package.
"""

from penstock.fingerprint.code import register_code
from penstock.fingerprint.state import register_state
from penstock.fingerprint.values import register_values
from penstock.fingerprint.walk import fingerprint

register_values()
register_code()
register_state()

__all__ = ["fingerprint"]
