"""Measurements that are made once and applied to every request, such as the quality gate; and
metrics of answers.
"""
