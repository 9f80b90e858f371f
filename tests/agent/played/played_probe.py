"""An inventory probe that finds a processor at once."""

print('{"type":"device","device":"CPU","properties":{"FULL_DEVICE_NAME":"a processor"}}')
print('{"type":"finished"}')
