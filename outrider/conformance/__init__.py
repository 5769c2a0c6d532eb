"""Checks that a drafter in any language keeps the contract of the draft stream."""
