"""Pipelines made of others: mixes of several, and rows of tokens packed from documents."""
