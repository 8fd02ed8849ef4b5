"""``penstock doctor``: reports missing packages, wrong settings and low limits, with fixes.

``facts`` gathers, ``checks`` judges the facts, ``report`` shows the findings. ``probe`` runs in the
processes that import one package each.
"""
