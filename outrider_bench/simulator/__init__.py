"""Runs the production engine, planner, tries and drafters in virtual time."""
