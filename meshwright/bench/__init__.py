"""Measurements of one device's share of a training job, beside what that device could do at best."""
