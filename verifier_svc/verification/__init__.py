"""Which draft tokens stand: acceptance rules, grammar masks, log probabilities."""
