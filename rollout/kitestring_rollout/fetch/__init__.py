"""Brings what a trainer needs, models and task files, from object storage and hubs into folders."""
