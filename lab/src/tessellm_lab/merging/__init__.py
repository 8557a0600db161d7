"""Merges of a composition's members beside it in one table: made by mergekit, their strengths chosen fairly."""
