"""What this machine offers, what is missing or set wrongly, and what to do about it.

``facts`` and ``packages`` look, ``checks`` and its parts judge without looking, ``report`` shows,
and ``command`` is what the command line calls.
"""
