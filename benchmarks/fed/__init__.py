"""Trainers on several hosts: Penstock beside Ray Data and the tf.data service."""
