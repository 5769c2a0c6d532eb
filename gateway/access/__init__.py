"""Who may call the gateway: Host and Origin, API keys and their roles, and limits."""
