"""`outrider simulate`: the production engine, planner, tries and drafters' stream logic, run in virtual time."""
