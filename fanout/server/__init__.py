"""The server: REST and S3 over an embedded connection. `app.create_app` makes it of a `state.State`."""
