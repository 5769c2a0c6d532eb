"""What processes say to each other: messages, their limits and errors, and the wire's forms."""
