"""From records to a report: facts, tables, verdicts and charts."""
