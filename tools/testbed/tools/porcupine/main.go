// Reads a history of writes and reads of keys, and exits with 1 if it is not linearizable, by porcupine.
//
// A line is an operation: `KEY CLIENT BEGIN END write|read VALUE`. END is `-` if it is unknown whether, and when, the operation
// took effect. A key has the value 0 at first.
package main

import (
	"bufio"
	"fmt"
	"math"
	"os"
	"strconv"
	"time"

	"github.com/anishathalye/porcupine"
)

type input struct {
	key     int
	isWrite bool
	value   int
}

var register = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		byKey := map[int][]porcupine.Operation{}
		for _, operation := range history {
			key := operation.Input.(input).key
			byKey[key] = append(byKey[key], operation)
		}
		var parts [][]porcupine.Operation
		for _, part := range byKey {
			parts = append(parts, part)
		}
		return parts
	},
	Init: func() interface{} { return 0 },
	Step: func(state, in, out interface{}) (bool, interface{}) {
		if operation := in.(input); operation.isWrite {
			return true, operation.value
		}
		return out.(int) == state.(int), state
	},
}

func main() {
	var history []porcupine.Operation
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var key, client, value int
		var begin int64
		var end, kind string
		_, err := fmt.Sscan(lines.Text(), &key, &client, &begin, &end, &kind, &value)
		if err != nil || (kind != "write" && kind != "read") {
			fmt.Fprintf(os.Stderr, "not an operation: %q\n", lines.Text())
			os.Exit(2)
		}
		returned := int64(math.MaxInt64)
		if end != "-" {
			if returned, err = strconv.ParseInt(end, 10, 64); err != nil {
				fmt.Fprintf(os.Stderr, "no time: %q\n", lines.Text())
				os.Exit(2)
			}
		}
		operation := porcupine.Operation{ClientId: client, Input: input{key, kind == "write", value}, Call: begin, Output: value, Return: returned}
		history = append(history, operation)
	}
	if err := lines.Err(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	result := porcupine.CheckOperationsTimeout(register, history, 5*time.Minute)
	fmt.Printf("%d operations: %s\n", len(history), result)
	switch result {
	case porcupine.Ok:
	case porcupine.Illegal:
		os.Exit(1)
	default:
		os.Exit(2)
	}
}
