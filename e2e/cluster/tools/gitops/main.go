// Judges an object as Argo CD and Flux do: a health check in Lua, and expressions in CEL.
//
// Standard input is JSON: {"lua": script, "cel": {name: expression}, "object": {…}}. The answer is
// {"lua": {"status", "message"}, "cel": {name: true or false}}. Argo CD runs gopher-lua, Flux cel-go.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	lua "github.com/yuin/gopher-lua"
)

type question struct {
	Lua    string
	Cel    map[string]string
	Object map[string]any
}

type answer struct {
	Lua map[string]string `json:"lua"`
	Cel map[string]bool   `json:"cel"`
}

func main() {
	var asked question
	err := json.NewDecoder(os.Stdin).Decode(&asked)
	said := answer{Cel: map[string]bool{}}
	if err == nil {
		said.Lua, err = health(asked.Lua, asked.Object)
	}
	for name, expression := range asked.Cel {
		if err == nil {
			said.Cel[name], err = holds(expression, asked.Object)
		}
	}
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(said)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// health runs the script with the global `obj`, and returns the strings of the table it returns.
func health(script string, object any) (map[string]string, error) {
	state := lua.NewState()
	defer state.Close()
	state.SetGlobal("obj", luaValue(state, object))
	if err := state.DoString(script); err != nil {
		return nil, err
	}
	table, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		return nil, fmt.Errorf("the script returned %s and not a table", state.Get(-1).Type())
	}
	found := map[string]string{}
	table.ForEach(func(key, value lua.LValue) { found[key.String()] = value.String() })
	return found, nil
}

func luaValue(state *lua.LState, value any) lua.LValue {
	switch value := value.(type) {
	case string:
		return lua.LString(value)
	case float64:
		return lua.LNumber(value)
	case bool:
		return lua.LBool(value)
	case map[string]any:
		table := state.NewTable()
		for key, one := range value {
			table.RawSetString(key, luaValue(state, one))
		}
		return table
	case []any:
		table := state.NewTable()
		for _, one := range value {
			table.Append(luaValue(state, one))
		}
		return table
	}
	return lua.LNil
}

// holds evaluates an expression whose variables are the fields of the object, as Flux has them.
func holds(expression string, object map[string]any) (bool, error) {
	options := []cel.EnvOption{}
	for _, name := range []string{"apiVersion", "kind", "metadata", "spec", "status"} {
		options = append(options, cel.Variable(name, cel.DynType))
	}
	environment, err := cel.NewEnv(options...)
	if err != nil {
		return false, err
	}
	compiled, issues := environment.Compile(expression)
	if issues.Err() != nil {
		return false, issues.Err()
	}
	program, err := environment.Program(compiled)
	if err != nil {
		return false, err
	}
	result, _, err := program.Eval(object)
	if err != nil {
		return false, err
	}
	return result == types.True, nil
}
