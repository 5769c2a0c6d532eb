"""What a request passes before its handler: connections, admission, body, types of fields."""
