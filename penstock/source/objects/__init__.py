"""Objects in buckets and on web servers, by URL: listing them, and fetching them ahead of time.

Requests are made by a process of their own, the *fetcher* (``fetcher.py``). The library behind it
runs threads that do not survive a fork: a forked worker that used it would hang.
"""
