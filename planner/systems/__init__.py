"""The training systems as data: the table, operations, weight versions, rules from outside."""
