"""Work of the server: threads and slots shared fairly by tenants, and bounds on connections."""
