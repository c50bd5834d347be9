"""The HTTP face: app factory, schemas, one router per concern, one exception handler."""
