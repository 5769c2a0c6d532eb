"""`outrider simulate`: runs the production engine, planner, tries and drafters in virtual time."""
