module kitestring.dev/e2e/own

go 1.25.0
